//! When nodes pull the images of jobs again that never end, spread over time.

use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::{SignedDuration, Timestamp};

use kruise_api::image_pull_job::{CompletionPolicyType, ImagePullJobSpec};
use kruise_api::schedule::Schedule;

/// Seconds after which a job with completion policy `Never` and without a schedule pulls again.
pub const REPULL_INTERVAL: i64 = 24 * 3600;
/// Jitter of that interval in both directions, in seconds, so that nodes do not pull all at once.
const REPULL_JITTER: i64 = 600;
/// Maximum jitter of a scheduled pull, in seconds. How many nodes pull at once is limited by the parallelism.
pub const SCHEDULE_JITTER: i64 = 60;

/// When a job that never ends pulls again on a node whose pull ended at `completed`; `None` if the job ends.
#[must_use]
pub fn repull_at(spec: &ImagePullJobSpec, seed: u64, completed: Timestamp) -> Option<Timestamp> {
    if spec.completion_policy.type_ != Some(CompletionPolicyType::Never) {
        return None;
    }
    let (next, offset) = match &spec.schedule {
        Some(schedule) => {
            let next = Schedule::parse(schedule).ok()?.next_after(completed)?;
            (next, jitter(seed, SCHEDULE_JITTER + 1))
        }
        None => (completed, repull_interval(seed)),
    };
    next.checked_add(SignedDuration::from_secs(offset)).ok()
}

/// Seconds between two pulls of a node without a schedule.
pub fn repull_interval(seed: u64) -> i64 {
    REPULL_INTERVAL + jitter(seed, 2 * REPULL_JITTER + 1) - REPULL_JITTER
}

/// A number that differs between nodes, as a seed for [`jitter`].
#[must_use]
pub fn node_seed(node: &str) -> u64 {
    let mut seed = DefaultHasher::new();
    node.hash(&mut seed);
    seed.finish()
}

/// A pseudo-random number in `0..bound`.
pub fn jitter(seed: u64, bound: i64) -> i64 {
    let bound = u64::try_from(bound).unwrap_or(1).max(1);
    // SplitMix64: neighboring seeds give unrelated numbers.
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    i64::try_from((z ^ (z >> 31)) % bound).unwrap_or(0)
}
