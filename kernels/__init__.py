"""Every hot operation: one public function each, a plain torch truth beside it."""
