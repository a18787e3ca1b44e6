//! All decisions about ImagePullJobs: pure functions and in-memory state.
//!
//! [`job`] parses a job; [`index`] and [`running_job`] record which job waits for what on which node; [`pending_nodes`]
//! records which nodes are about to get a NodeImage; [`entry`] decides what a NodeImage is requested; [`quota`] how
//! much of it a namespace may take, and [`batch`] which of several requests fit; [`registry_limit`] whose turn it is at
//! a registry; and [`status`] the status of the job and its end.
//!
//! All state can be derived from objects, except for two things, which are lost with the leader: a node whose request
//! the API server refused permanently is requested once more and refused again; and a node that had its outcome before
//! another job requested the tag again counts as pulling until that pull has ended, whose outcome is then used for
//! both. The end of jobs depends on neither. Names of failed nodes in a status are not read back: they are for users.

pub mod batch;
pub mod entry;
pub mod index;
pub mod job;
pub mod pending_nodes;
pub mod quota;
pub mod registry_limit;
pub mod running_job;
pub mod status;
