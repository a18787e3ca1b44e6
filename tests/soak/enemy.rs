//! Breaks one thing after the other, for a while each, and mends it.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use testbed::cluster::Component;

use super::bed::{Bed, OURS, Ours};
use super::growth::Growth;
use super::network::{FAULTS, Mode};
use support::chance::Chance;

/// A part of the node or of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    ApiServer,
    Etcd,
    Containerd,
    Kubelet,
}

/// What is done to the bed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill(Ours),
    Freeze(Ours),
    Network(Ours, Mode),
    /// Of every program, so that nobody leads meanwhile.
    NoNetwork(Mode),
    /// Seconds that its wall clock is ahead, or behind.
    Clock(Ours, i64),
    KillTheirs(Theirs),
    FreezeTheirs(Theirs),
    FullDisk,
}

/// Seconds that a clock is stepped at most: what a machine with a wrong time zone is off.
const STEP: u64 = 2 * 3600;

impl Fault {
    /// Anything, but that `spared` is not killed.
    fn any(chance: &mut Chance, spared: Ours) -> Self {
        let ours = chance.one_of(&OURS);
        match chance.below(10) {
            0 | 1 if ours != spared => Self::Kill(ours),
            0 | 1 => Self::Kill(OURS[(ours as usize + 1) % OURS.len()]),
            2 => Self::Freeze(ours),
            3 | 4 => Self::Network(ours, chance.one_of(&FAULTS)),
            5 => Self::NoNetwork(chance.one_of(&FAULTS)),
            6 => Self::Clock(
                ours,
                i64::try_from(chance.below(2 * STEP)).unwrap() - i64::try_from(STEP).unwrap(),
            ),
            7 => Self::KillTheirs(chance.one_of(&[Theirs::ApiServer, Theirs::Etcd, Theirs::Containerd])),
            8 => Self::FreezeTheirs(chance.one_of(&[
                Theirs::ApiServer,
                Theirs::Containerd,
                Theirs::Etcd,
                Theirs::Kubelet,
            ])),
            _ => Self::FullDisk,
        }
    }

    /// How long it lasts, in seconds. A node that is silent for longer than 40 s is taken for lost, and its Pods with it.
    fn longest(self) -> u64 {
        match self {
            Self::Kill(_) => 5,
            Self::KillTheirs(_) | Self::FullDisk => 10,
            Self::FreezeTheirs(_) => 15,
            Self::Freeze(_) | Self::Network(..) | Self::NoNetwork(_) | Self::Clock(..) => 25,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Network(_, mode) | Self::NoNetwork(mode) => format!("network {mode:?}"),
            Self::Clock(..) => "clock".into(),
            other => format!("{other:?}"),
        }
    }
}

fn theirs(bed: &mut Bed, which: Theirs) -> &mut Component {
    match which {
        Theirs::ApiServer => &mut bed.node.plane.apiserver,
        Theirs::Etcd => &mut bed.node.plane.etcd,
        Theirs::Containerd => &mut bed.node.runtime.containerd,
        Theirs::Kubelet => &mut bed.node.kubelet,
    }
}

fn begin(bed: &mut Bed, fault: Fault) {
    match fault {
        Fault::Kill(which) => bed.program(which).kill().unwrap(),
        Fault::Freeze(which) => bed.program(which).freeze().unwrap(),
        Fault::Network(which, mode) => bed.network(which).set(mode),
        Fault::NoNetwork(mode) => OURS.iter().for_each(|which| bed.network(*which).set(mode)),
        Fault::Clock(which, seconds) => bed.step_clock(which, seconds),
        Fault::KillTheirs(which) => theirs(bed, which).kill().unwrap(),
        Fault::FreezeTheirs(which) => theirs(bed, which).freeze().unwrap(),
        Fault::FullDisk => bed.fill_disk(true),
    }
}

fn end(bed: &mut Bed, fault: Fault) {
    match fault {
        // Nothing says when it can be used: what it needs may be broken on purpose the next moment.
        Fault::Kill(which) => bed.program(which).spawn().unwrap(),
        Fault::Freeze(which) => bed.program(which).thaw().unwrap(),
        Fault::Network(which, _) => bed.network(which).set(Mode::Open),
        Fault::NoNetwork(_) => OURS.iter().for_each(|which| bed.network(*which).set(Mode::Open)),
        Fault::Clock(which, _) => bed.step_clock(which, 0),
        Fault::KillTheirs(which) => theirs(bed, which).start().unwrap(),
        Fault::FreezeTheirs(which) => theirs(bed, which).thaw().unwrap(),
        Fault::FullDisk => bed.fill_disk(false),
    }
}

/// Nothing is heard of the API server for longer than what was heard may be relied upon.
const OUTAGE: Duration = Duration::from_secs(240);
/// How long it takes at most to say so, or to be ready again.
const NOTICED: Duration = Duration::from_secs(180);
/// From one outage to the next.
const BETWEEN_OUTAGES: Duration = Duration::from_secs(1200);

/// Cuts all programs off until the daemon says that what it knows is stale; then all of them come back.
fn outage(bed: &Bed, mode: Mode) {
    let set = |mode| OURS.iter().for_each(|which| bed.network(*which).set(mode));
    let until = |what: &str, limit: Duration, seen: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !seen() {
            let says = OURS.map(|which| bed.readiness(which));
            assert!(start.elapsed() < limit, "not {what} after {limit:?}: {says:#?}");
            sleep(Duration::from_secs(1));
        }
        println!("         {what} after {:.0} s", start.elapsed().as_secs_f64());
    };
    if mode == Mode::Broken {
        // It leaves watches that run as they are.
        set(Mode::Reset);
        sleep(Duration::from_secs(1));
    }
    set(mode);
    let stale = || {
        let says = bed.readiness(Ours::Daemon);
        !says.starts_with("HTTP/1.1 200") && says.contains("is stale")
    };
    until("stale", OUTAGE + NOTICED, &stale);
    set(Mode::Open);
    let says = |which| bed.readiness(which);
    until("ready again, with a leader", NOTICED, &|| {
        OURS.iter().all(|which| says(*which).starts_with("HTTP/1.1 200"))
            && [Ours::FirstManager, Ours::SecondManager]
                .iter()
                .any(|which| says(*which).contains("leading"))
    });
}

/// Each program lives through a part of the run, so that what grows slowly is seen.
fn spared(elapsed: Duration, length: Duration) -> Ours {
    let part = (elapsed.as_secs_f64() / length.as_secs_f64() * OURS.len() as f64) as usize;
    OURS[part.min(OURS.len() - 1)]
}

/// Makes faults until then; how many of each there were, and what our programs took meanwhile. All is mended when this returns, and every program runs.
pub fn rage(bed: &mut Bed, mut chance: Chance, until: Instant) -> (BTreeMap<String, u32>, Growth) {
    let (start, mut made) = (Instant::now(), BTreeMap::new());
    let mut growth = Growth::over(until - start, bed);
    let mut next_outage = start + BETWEEN_OUTAGES.min((until - start) / 4);
    while Instant::now() < until {
        sleep(chance.seconds(1, 6));
        if (next_outage..until - OUTAGE.min(until - start)).contains(&Instant::now()) {
            let mode = chance.one_of(&[Mode::Reset, Mode::Silent, Mode::Broken]);
            println!("{:>6.1} s: an outage, {mode:?}", start.elapsed().as_secs_f64());
            outage(bed, mode);
            *made.entry(format!("outage {mode:?}")).or_default() += 1;
            next_outage = Instant::now() + BETWEEN_OUTAGES;
        }
        let spared = spared(start.elapsed(), until - start);
        let fault = Fault::any(&mut chance, spared);
        growth.look(bed);
        if let Fault::Kill(which) = fault {
            growth.ends(bed, which);
        }
        let lasts = chance.seconds(0, fault.longest());
        println!(
            "{:>6.1} s: {fault:?} for {:.1} s",
            start.elapsed().as_secs_f64(),
            lasts.as_secs_f64()
        );
        begin(bed, fault);
        sleep(lasts);
        end(bed, fault);
        *made.entry(fault.name()).or_default() += 1;
        survivors(bed, fault);
    }
    (made, growth)
}

/// A program of ours ends only where it was killed; what cannot reach the API server waits for it.
fn survivors(bed: &mut Bed, fault: Fault) {
    for which in OURS {
        let program = bed.program(which);
        assert!(
            program.running(),
            "{which:?} ended at {fault:?}:\n{}",
            program.tail()
        );
    }
}

/// Longest time that anything may take to be right again after the last fault.
pub const RECOVERY: Duration = Duration::from_secs(600);
