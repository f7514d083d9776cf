"""The coordinator's conversation with its workers: messages, transition table, votes."""
