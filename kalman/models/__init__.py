"""Model definitions: structures, entries from columns, functions of the user's, and their checks."""
