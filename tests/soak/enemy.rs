//! Breaks one thing after the other, for a while each, and mends it.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use xtask::cluster::Component;

use super::bed::{Bed, OURS, Ours};
use super::network::{FAULTS, Mode};
use super::support::chance::Chance;

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
    fn any(chance: &mut Chance) -> Self {
        let ours = chance.one_of(&OURS);
        match chance.below(10) {
            0 | 1 => Self::Kill(ours),
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

/// Makes faults until then; how many of each there were. All is mended when this returns, and every program runs.
pub fn rage(bed: &mut Bed, mut chance: Chance, until: Instant) -> BTreeMap<String, u32> {
    let (start, mut made) = (Instant::now(), BTreeMap::new());
    while Instant::now() < until {
        sleep(chance.seconds(1, 6));
        let fault = Fault::any(&mut chance);
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
    made
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
