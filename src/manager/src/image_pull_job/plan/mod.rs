//! Everything about ImagePullJobs that is decided: by pure functions and plain memory.
//!
//! [`job`] reads a job, [`index`] and [`running_job`] know which job waits for what on which node, [`pending_nodes`] which nodes
//! are about to come, [`entry`] says what a NodeImage is asked, [`quota`] how much of it a namespace may take, and [`status`] what the job's status says and when
//! the job ends.
//!
//! All of it can be derived from objects, but for two things, which end with the leader: a node that the API server
//! refused for good is asked once more and refused again; and a node that had its outcome before another job asked
//! for the tag anew counts as pulling until that pull has ended, whose outcome is then taken for both. The jobs' end
//! depends on neither. Names of failed nodes in a status are not read back: what is written there is for people.

pub mod entry;
pub mod index;
pub mod job;
pub mod pending_nodes;
pub mod quota;
pub mod running_job;
pub mod status;
