//! Everything about ImagePullJobs that is decided: by pure functions and plain memory.
//!
//! [`job`] reads a job, [`index`] and [`work`] know which job waits for what on which node, [`awaited`] which nodes
//! are about to come, [`entry`] says what a
//! NodeImage is asked, and [`status`] what the job's status says and when the job ends.

pub mod awaited;
pub mod entry;
pub mod index;
pub mod job;
pub mod status;
pub mod work;
