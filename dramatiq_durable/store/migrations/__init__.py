"""Numbered migrations.  Each has the statements of one step up and one step down, as templates of the dialects."""
