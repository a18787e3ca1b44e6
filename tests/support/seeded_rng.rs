//! Random numbers from a seed, so that a run can be repeated.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A SplitMix64 random number generator.
#[derive(Clone, Debug)]
pub struct SeededRng(u64);

impl SeededRng {
    /// Seed from `KRUISE_SEED`, or the clock; the seed is printed.
    pub fn new() -> Self {
        let from_env = std::env::var("KRUISE_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
        let seed = from_env.unwrap_or_else(|| u64::try_from(clock()).unwrap());
        println!("KRUISE_SEED={seed}");
        Self(seed)
    }

    /// A number from 0 to below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// A random one of these.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }

    /// A random duration between these, in seconds.
    pub fn random_duration(&mut self, min: u64, max: u64) -> Duration {
        Duration::from_millis(min * 1000 + self.below((max - min) * 1000))
    }
}
