"""Settings for every test: examples are not timed (machines are noisy), CI draws the same ones each time, and commands
that tests run have the surroundings of a user's."""

import os
from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("any", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "any")

# Where it is set, nothing shows what stays in the buffers of stdout.
os.environ.pop("PYTHONUNBUFFERED", None)

if find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        # Triton must know it when it is imported, which transformers may do at any time.
        os.environ["TRITON_INTERPRET"] = "1"
