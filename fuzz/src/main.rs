//! libFuzzer over one of the targets of `kruise_fuzzing`, named by `FUZZ_TARGET`.
#![no_main]

use std::sync::LazyLock;

use kruise_fuzzing::{TARGETS, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let wanted = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(name, _)| *name == wanted);
    let Some((_, target)) = found else {
        let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!("FUZZ_TARGET is {wanted:?}; expected one of {}", names.join(", "));
        std::process::exit(2);
    };
    *target
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET(data));
