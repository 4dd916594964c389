"""Generated protocol stubs, package ``cedar.v1``. Regenerate with ``python -m cedar.ops.stubs``."""
