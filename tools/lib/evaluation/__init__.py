"""The subcommands of tools.evaluate, each with its `main(arguments)`."""
