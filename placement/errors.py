"""Everything that Moetis raises on purpose.

MoetisError
├── InputError (a ValueError)   what a user gave is wrong: exit code 2
│   ├── ConfigError             a YAML file or an option
│   ├── TraceError              a routing trace
│   ├── TopologyError           a topology
│   ├── PlacementError          a placement or a plan file
│   └── RequestError            one generation request
├── MigrationError              a migration could not be carried out; the old epoch goes on serving
├── DiskError                an expert cannot be read from disk: the requests that need it fail, alone
├── StaleEpochError             a message of another epoch than the one that serves
└── ExchangeError               the ranks fell out of step: a peer is gone, or its part of a layer failed
"""


class MoetisError(Exception):
    """The root of the tree."""


class InputError(MoetisError, ValueError):
    """A value from outside is wrong; the message names the file or key, the value, and what would be right."""


class ConfigError(InputError):
    """A configuration file or a command-line option is wrong."""


class TraceError(InputError):
    """A routing trace is missing, broken, empty, or of another model."""


class TopologyError(InputError):
    """A topology does not describe a tree of ranks, or does not fit what it is used with."""


class PlacementError(InputError):
    """A placement breaks an invariant, or a plan file is not one."""


class RequestError(InputError):
    """One generation request cannot be served; the others go on."""


class MigrationError(MoetisError):
    """A migration failed and was rolled back."""


class DiskError(MoetisError):
    """An expert's weights cannot be read from disk, or written there."""


class StaleEpochError(MoetisError):
    """A rank was asked to act under an epoch that it does not serve."""


class ExchangeError(MoetisError):
    """A collective failed, so that this rank can no longer serve in step with the others."""
