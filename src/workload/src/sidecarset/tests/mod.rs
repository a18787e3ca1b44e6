#![allow(clippy::unwrap_used, clippy::panic)]

mod reconcile_vectors;
mod update_vectors;
