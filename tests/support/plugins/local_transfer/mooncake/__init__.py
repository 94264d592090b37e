"""Takes the place of the package ``mooncake`` in servers under test."""
