"""The connections of a virtual worker's stages: links, the form of their messages, copies between memories."""
