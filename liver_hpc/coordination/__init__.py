"""The coordinator's parts: inbox, crew, wishes, handoffs, records, store."""
