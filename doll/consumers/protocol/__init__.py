"""A worker's protocol with the parameter server: announcements, grants and answers. Pure."""
