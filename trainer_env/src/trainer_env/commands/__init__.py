"""The subcommands of tandem-train: for each of arguments.COMMANDS a module whose `main(argv)` gives the exit status.

They raise BridgeError and ConfigError like everything else; cli.py says them in words.
"""
