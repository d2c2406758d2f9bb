"""Model definitions: structures, entries from columns, users' functions, and checks."""
