"""Model families as compositions of layers, and the loader that fills them. A family never mentions a file format."""
