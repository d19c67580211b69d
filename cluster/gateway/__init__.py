"""The OpenAI-compatible gateway: Ray Serve in front, the fleet behind, a relay between."""
