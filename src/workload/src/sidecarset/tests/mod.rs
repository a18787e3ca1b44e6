#![allow(clippy::unwrap_used, clippy::panic)]

mod cluster;
mod history;
mod hostile;
mod matching;
mod reconcile_vectors;
mod rollout;
mod update_vectors;
mod waiting;
