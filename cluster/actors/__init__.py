"""The Ray actors: thin shells around the plain classes, and the only place that makes them."""
