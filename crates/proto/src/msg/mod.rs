//! Messages between processes, as numbered fields in CBOR arrays.

pub mod block;
pub mod dump;
pub mod meta;

/// Decodes a whole message; trailing bytes are allowed, since a newer peer may add fields.
pub fn decode<'b, T: minicbor::Decode<'b, ()>>(bytes: &'b [u8]) -> crate::Result<T> {
    minicbor::decode(bytes).map_err(|e| {
        crate::Fault::new(crate::Code::Protocol, format!("a message cannot be decoded: {e}"))
            .next("check that both ends run neighbouring versions of torchfs")
    })
}

/// Encodes a message.
pub fn encode<T: minicbor::Encode<()>>(message: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    match minicbor::encode(message, &mut bytes) {
        Ok(()) => bytes,
        Err(error) => unreachable!("writing to memory cannot fail: {error}"),
    }
}
