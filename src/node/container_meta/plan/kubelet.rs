//! A model of how kubelet's worker of a Pod goes about its updates: whatever is written before the environment changes, the
//! container that we stop is started with the new one.
//!
//! It takes for granted that kubelet hears of a write within 250 ms, that it looks at its containers at least every
//! 1.3 s, and that no pass of the worker but the one that starts a container takes longer than 200 ms.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::world::World;
use super::*;

const TICK: Duration = Duration::from_millis(10);
const SECOND: u64 = 1000;

/// Kubelet, as far as it concerns one Pod of one container. An environment goes by its label, times are milliseconds.
#[derive(Debug, Default)]
struct Kubelet {
    /// When it looks at its containers first, and how long it is from one look to the next.
    looks: (u64, u64),
    /// How long a pass of the worker takes.
    takes: u64,
    /// What its watch has told.
    knows: u8,
    /// What waits for the worker.
    pending: Option<u8>,
    /// What the worker has in hand.
    in_hand: Option<u8>,
    /// Until when it is at it.
    busy_until: u64,
    last_pass: u64,
    last_look: u64,
    saw_it_run: bool,
    /// What it started the container with again.
    started_with: Option<u8>,
}

impl Kubelet {
    /// Something makes it look at the Pod as it knows it.
    fn update(&mut self) {
        self.pending = Some(self.knows);
    }

    /// A moment passes. The container runs, or not.
    fn moment(&mut self, now: u64, runs: bool) {
        if now % self.looks.1 == self.looks.0 {
            self.last_look = now;
            if self.saw_it_run && !runs {
                self.update();
            }
            self.saw_it_run = runs;
        }
        if now < self.busy_until {
            return;
        }
        if self.in_hand.is_none() {
            self.in_hand = self.pending.take();
        }
        // It acts by a look at the containers that is newer than its last pass.
        if self.last_look <= self.last_pass {
            return;
        }
        let Some(label) = self.in_hand.take() else { return };
        if !self.saw_it_run && self.started_with.is_none() {
            self.started_with = Some(label);
        }
        (self.last_pass, self.busy_until) = (now + self.takes, now + self.takes);
    }
}

/// What happens to a Pod, and when.
#[derive(Clone, Debug)]
struct Life {
    /// Writes that make kubelet look, before the environment changes.
    writes: Vec<u64>,
    /// How long before the environment the gate is written, if ever.
    gate: Option<u64>,
    /// Whether condition Ready tells of the gate.
    said: bool,
    /// How much later than a write kubelet hears of it, and the daemon.
    lags: (u64, u64),
    /// How long the container takes to end.
    ends: u64,
    looks: (u64, u64),
    takes: u64,
}

/// When the environment changes.
const CHANGE: u64 = 10 * SECOND;

fn life() -> impl Strategy<Value = Life> {
    // One after the other, such that some wait for the worker while it has another in hand.
    let burst = (0..5 * SECOND / 2, prop::collection::vec(0..300_u64, 1..4));
    let writes = prop::option::of(burst).prop_map(|burst| {
        let (before, gaps) = burst.unwrap_or((QUIET.as_secs() * SECOND, vec![1]));
        gaps.iter().map(|gap| CHANGE - before - gap).collect()
    });
    let gate = prop::option::weighted(0.9, 0..200_u64);
    let lags = (0..250_u64, 0..100_u64);
    let ends = prop_oneof![0..30_u64, 0..800_u64];
    let looks = (0..100_u64, 100..130_u64).prop_map(|(first, period)| (first * 10, period * 10));
    (writes, gate, any::<bool>(), lags, ends, looks, 0..20_u64).prop_map(
        |(writes, gate, said, lags, ends, looks, takes)| Life {
            writes,
            gate,
            said,
            lags,
            ends,
            looks,
            takes: takes * 10,
        },
    )
}

/// Plays it; what kubelet started the container with, and when we stopped it.
fn play(life: &Life) -> (Option<u8>, u64) {
    let mut world = World::new(&[true]);
    world.start(0);
    world.pass();
    world.told = world.stored.clone();
    world.now += QUIET;
    let gate = life.gate.map(|before| CHANGE - before);
    let mut kubelet = Kubelet {
        looks: life.looks,
        takes: life.takes,
        saw_it_run: true,
        ..Kubelet::default()
    };
    let (mut stopped, begin) = (None, world.now);
    let tick = u64::try_from(TICK.as_millis()).unwrap();
    for now in (0..2 * CHANGE).step_by(10) {
        let passes = |at: u64, lag: u64| (now..now + tick).contains(&(at + lag));
        let (kubelets, ours) = life.lags;
        let change = |lag: u64| passes(CHANGE, lag);
        if change(kubelets) {
            kubelet.knows = 1;
        }
        let gate_wakes = !life.said && gate.is_some_and(|at| passes(at, kubelets));
        if change(kubelets) || gate_wakes || life.writes.iter().any(|at| passes(*at, kubelets)) {
            kubelet.update();
        }
        world.now = begin + Duration::from_millis(now);
        let mut told = change(ours);
        world.label = u8::from(world.label == 1 || told);
        for at in &life.writes {
            if passes(*at, ours) {
                (world.note, told) = (world.note.wrapping_add(1), true);
            }
        }
        if gate.is_some_and(|at| passes(at, ours)) || (gate.is_none() && told) {
            (world.updating, world.said, told) = (true, life.said, true);
        }
        if told {
            world.notice();
        }
        if stopped.is_none() {
            let (pod, meta) = world.pod();
            let plan = super::plan(&pod, &meta, &world.memory, true, world.now);
            stopped = (!plan.restart.is_empty()).then_some(now);
        }
        let runs = stopped.is_none_or(|at| now < at + life.ends);
        kubelet.moment(now, runs || kubelet.started_with.is_some());
    }
    (kubelet.started_with, stopped.expect("stopped"))
}

proptest! {
    #[test]
    fn kubelet_starts_the_container_with_its_new_environment(life in life()) {
        let (started_with, stopped) = play(&life);
        prop_assert_eq!(started_with, Some(1), "stopped at {}", stopped);
    }
}

/// A Pod that is left alone but for its update.
#[test]
fn a_quiet_pod_is_not_kept_waiting() {
    let life = Life {
        writes: vec![1],
        gate: Some(20),
        said: true,
        lags: (0, 0),
        ends: 0,
        looks: (500, SECOND),
        takes: 20,
    };
    assert_eq!(
        play(&life),
        (Some(1), CHANGE + u64::try_from(HEARD.as_millis()).unwrap())
    );
}
