"""Images with boxes: formats, checks, sources."""
