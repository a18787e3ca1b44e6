#![allow(clippy::unwrap_used, clippy::panic)]

mod update_vectors;
