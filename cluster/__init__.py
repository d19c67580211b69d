"""Wire: the only importer of ray. Actors, placement service, configuration, command line."""
