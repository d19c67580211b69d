"""Will a model fit? Arithmetic on its `config.json` and the headers of its safetensors shards; no weight is read."""
