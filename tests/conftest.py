"""Settings for every test: examples are not timed (machines are noisy), and CI draws the same ones each time."""

import os

from hypothesis import settings

settings.register_profile("any", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")
