"""What a checkpoint can do wrong."""

from quantd.kernels.errors import QuantdError


class CheckpointError(QuantdError):
    """A model on disk is damaged, incomplete or contradicts itself."""


class UnsupportedModelError(QuantdError):
    """A model is sound but asks for an architecture, format or option that quantd does not have."""
