"""One file for each verb of the ``cedar`` command."""
