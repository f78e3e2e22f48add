"""The op table on NVIDIA GPUs: Triton kernels, compiled by triton where they are first launched.

Importing this package (or a module of it) settles whether a product and a sum may become one fused
multiply-add: not of the compiler's own accord. Which pairs it fuses hangs on a kernel's tile sizes and
on the target, and a fused pair rounds once where others round twice, so a row could change its bits with
the size of its batch. A kernel that wants the fused form, as a dot by hand does for speed, says `tl.fma`,
which is the same in every configuration. Tensor cores are not touched by it.
"""

import os

# Read by triton whenever it compiles or launches; it warns where the choice is left open.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
