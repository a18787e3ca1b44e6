#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod bounded;
mod cases;
mod deadline;
mod faults;
mod happenings;
mod histories;
mod hooks;
mod limits;
mod node;
mod numbers;
mod partition;
mod predownload;
mod refused;
mod rest;
mod retries;
mod waits;
mod world;
