"""From files and topics to the measurements table or quarantine."""
