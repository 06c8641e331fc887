"""Storage and lookup of the tables of embedding collections; no path here is public."""
