"""The op table: every arithmetic step of a forward pass, in interchangeable implementations.

`ops.py` is the contract, `reference.py` its specification in plain torch. Importing this package
imports no torch; `quantd.kernels.select` does.
"""

__version__ = "0"
