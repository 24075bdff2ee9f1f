//! Both ends of a connection: frames, handshake, deadlines, cancellation.
