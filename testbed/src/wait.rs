//! Waiting for a state of the outside world, with a bound and a reason when it is not reached.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longer than anything takes that does come, on a machine that several beds keep busy.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Asks `probe` until it gives a value. Fails after `bound`, or at once when `probe` fails.
pub fn until<T>(what: &str, bound: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        if start.elapsed() > bound {
            bail!("{what}: not there after {bound:?}");
        }
        thread::sleep(Duration::from_millis(25));
    }
}
