//! Everything about ImagePullJobs that is decided: by pure functions and plain memory.
//!
//! [`job`] reads a job, [`index`] and [`work`] know which job waits for what on which node, [`awaited`] which nodes
//! are about to come, [`entry`] says what a NodeImage is asked, [`room`] how much of it a namespace may take, and [`status`] what the job's status says and when
//! the job ends.
//!
//! All of it can be derived from objects, but for two things, which end with the leader: a node that the API server
//! refused for good is asked once more and refused again; and a node that had its outcome before another job asked
//! for the tag anew counts as pulling until that pull has ended, whose outcome is then taken for both. The jobs' end
//! depends on neither. Names of failed nodes in a status are not read back: what is written there is for people.

pub mod awaited;
pub mod entry;
pub mod index;
pub mod job;
pub mod room;
pub mod status;
pub mod work;
