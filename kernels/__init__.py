"""Every hot operation: one public function each, a plain torch truth beside it."""

from cedar.kernels import mkl_order as mkl_order  # before anything multiplies
