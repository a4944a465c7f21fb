"""Tools to compare, watch, try, serve, import and export models."""
