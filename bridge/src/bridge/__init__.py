"""What both halves of Tandem share: messages, sockets and the life of processes."""
