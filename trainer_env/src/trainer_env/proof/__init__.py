"""The proof of sync: that the server computes the policy which is trained."""
