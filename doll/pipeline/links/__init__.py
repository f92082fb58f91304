"""What goes from stage to stage of a virtual worker: links, the form of their messages, copies between memories."""
