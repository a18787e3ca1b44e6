#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod cases;
mod histories;
mod hooks;
mod limits;
mod numbers;
mod waits;
mod world;
