"""The protocol of deltabus: messages, versions, order, and the port that backends implement."""
