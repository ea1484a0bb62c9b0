"""What holds the specification, the reference model and the production package together; see README.md here."""
