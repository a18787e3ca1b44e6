//! Polls for an external state, with a timeout and an error that names what was not reached.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Longer than any successful wait takes on a machine that several test clusters keep busy.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

const MIN_PAUSE: Duration = Duration::from_millis(25);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Polls `probe` until it returns a value. Fails after `timeout`, or at once if `probe` fails.
pub fn until<T>(what: &str, timeout: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        let elapsed = start.elapsed();
        if elapsed > timeout {
            bail!("{what}: not there after {timeout:?}");
        }
        // Many probes are processes, which would slow down what they wait for.
        thread::sleep((elapsed / 10).clamp(MIN_PAUSE, MAX_PAUSE));
    }
}
