"""Configuration: fields, flags, YAML files, and the run that weights came from."""
