//! Injects one fault after the other, for a while each, and removes it.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::{Duration, Instant};

use testbed::cluster::Component;

use super::faulty_proxy::{NETWORK_FAULTS, NetworkMode};
use super::resource_growth::GrowthMonitor;
use super::soak_cluster::{PROGRAMS, Program, SoakCluster};
use support::seeded_rng::SeededRng;

/// A part of the node or of the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterComponent {
    ApiServer,
    Etcd,
    Containerd,
    Kubelet,
}

/// A fault of the bed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectedFault {
    Kill(Program),
    Freeze(Program),
    Network(Program, NetworkMode),
    /// Of every program, so that there is no leader meanwhile.
    NoNetwork(NetworkMode),
    /// Seconds that its wall clock is ahead, or behind.
    Clock(Program, i64),
    KillComponent(ClusterComponent),
    FreezeComponent(ClusterComponent),
    FullDisk,
}

/// Maximum step of a clock in seconds: the error of a machine with a wrong time zone.
const MAX_CLOCK_STEP_SECONDS: u64 = 2 * 3600;

impl InjectedFault {
    /// Any fault, but `protected` is not killed.
    fn random(rng: &mut SeededRng, protected: Program) -> Self {
        let program = rng.one_of(&PROGRAMS);
        match rng.below(10) {
            0 | 1 if program != protected => Self::Kill(program),
            0 | 1 => Self::Kill(PROGRAMS[(program as usize + 1) % PROGRAMS.len()]),
            2 => Self::Freeze(program),
            3 | 4 => Self::Network(program, rng.one_of(&NETWORK_FAULTS)),
            5 => Self::NoNetwork(rng.one_of(&NETWORK_FAULTS)),
            6 => Self::Clock(
                program,
                i64::try_from(rng.below(2 * MAX_CLOCK_STEP_SECONDS)).unwrap()
                    - i64::try_from(MAX_CLOCK_STEP_SECONDS).unwrap(),
            ),
            7 => Self::KillComponent(rng.one_of(&[
                ClusterComponent::ApiServer,
                ClusterComponent::Etcd,
                ClusterComponent::Containerd,
            ])),
            8 => Self::FreezeComponent(rng.one_of(&[
                ClusterComponent::ApiServer,
                ClusterComponent::Containerd,
                ClusterComponent::Etcd,
                ClusterComponent::Kubelet,
            ])),
            _ => Self::FullDisk,
        }
    }

    /// Maximum duration in seconds. After 40 s without a heartbeat a node counts as lost, and its Pods with it.
    fn max_seconds(self) -> u64 {
        match self {
            Self::Kill(_) => 5,
            Self::KillComponent(_) | Self::FullDisk => 10,
            Self::FreezeComponent(_) => 15,
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

fn component(cluster: &mut SoakCluster, which: ClusterComponent) -> &mut Component {
    match which {
        ClusterComponent::ApiServer => &mut cluster.node.plane.apiserver,
        ClusterComponent::Etcd => &mut cluster.node.plane.etcd,
        ClusterComponent::Containerd => &mut cluster.node.runtime.containerd,
        ClusterComponent::Kubelet => &mut cluster.node.kubelet,
    }
}

fn inject(cluster: &mut SoakCluster, fault: InjectedFault) {
    match fault {
        InjectedFault::Kill(which) => cluster.program(which).kill().unwrap(),
        InjectedFault::Freeze(which) => cluster.program(which).freeze().unwrap(),
        InjectedFault::Network(which, mode) => cluster.network(which).set(mode),
        InjectedFault::NoNetwork(mode) => PROGRAMS
            .iter()
            .for_each(|which| cluster.network(*which).set(mode)),
        InjectedFault::Clock(which, seconds) => cluster.step_clock(which, seconds),
        InjectedFault::KillComponent(which) => component(cluster, which).kill().unwrap(),
        InjectedFault::FreezeComponent(which) => component(cluster, which).freeze().unwrap(),
        InjectedFault::FullDisk => cluster.fill_disk(true),
    }
}

fn recover(cluster: &mut SoakCluster, fault: InjectedFault) {
    match fault {
        // There is no readiness to wait for: the next fault may break what it needs.
        InjectedFault::Kill(which) => cluster.program(which).spawn().unwrap(),
        InjectedFault::Freeze(which) => cluster.program(which).thaw().unwrap(),
        InjectedFault::Network(which, _) => cluster.network(which).set(NetworkMode::Open),
        InjectedFault::NoNetwork(_) => PROGRAMS
            .iter()
            .for_each(|which| cluster.network(*which).set(NetworkMode::Open)),
        InjectedFault::Clock(which, _) => cluster.step_clock(which, 0),
        InjectedFault::KillComponent(which) => component(cluster, which).start().unwrap(),
        InjectedFault::FreezeComponent(which) => component(cluster, which).thaw().unwrap(),
        InjectedFault::FullDisk => cluster.fill_disk(false),
    }
}

/// The API server is unreachable for longer than cached data may be trusted.
const OUTAGE: Duration = Duration::from_secs(240);
/// Maximum time to report that, or to be ready again.
const DETECTION_TIMEOUT: Duration = Duration::from_secs(180);
/// Time between outages.
const OUTAGE_INTERVAL: Duration = Duration::from_secs(1200);

/// Disconnects all programs until the daemon reports stale data; then reconnects all of them.
fn inject_outage(cluster: &SoakCluster, mode: NetworkMode) {
    let set_all = |mode| {
        PROGRAMS
            .iter()
            .for_each(|which| cluster.network(*which).set(mode))
    };
    let wait_until = |what: &str, timeout: Duration, condition: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !condition() {
            let readyz = PROGRAMS.map(|which| cluster.readyz(which));
            assert!(
                start.elapsed() < timeout,
                "not {what} after {timeout:?}: {readyz:#?}"
            );
            sleep(Duration::from_secs(1));
        }
        println!("         {what} after {:.0} s", start.elapsed().as_secs_f64());
    };
    if mode == NetworkMode::Broken {
        // This fault does not break running watches.
        set_all(NetworkMode::Reset);
        sleep(Duration::from_secs(1));
    }
    set_all(mode);
    let is_stale = || {
        let readyz = cluster.readyz(Program::Daemon);
        !readyz.starts_with("HTTP/1.1 200") && readyz.contains("is stale")
    };
    wait_until("stale", OUTAGE + DETECTION_TIMEOUT, &is_stale);
    set_all(NetworkMode::Open);
    let readyz_of = |which| cluster.readyz(which);
    wait_until("ready again, with a leader", DETECTION_TIMEOUT, &|| {
        PROGRAMS
            .iter()
            .all(|which| readyz_of(*which).starts_with("HTTP/1.1 200"))
            && [Program::FirstManager, Program::SecondManager]
                .iter()
                .any(|which| readyz_of(*which).contains("leading"))
    });
}

/// Each program runs through a part of the test without a kill, so that slow growth shows.
fn protected_program(elapsed: Duration, length: Duration) -> Program {
    let part = (elapsed.as_secs_f64() / length.as_secs_f64() * PROGRAMS.len() as f64) as usize;
    PROGRAMS[part.min(PROGRAMS.len() - 1)]
}

/// Injects faults until the deadline; returns how many of each there were, and the resource usage of our programs. When
/// this returns, all faults are removed and every program runs.
pub fn inject_faults(
    cluster: &mut SoakCluster,
    mut rng: SeededRng,
    deadline: Instant,
) -> (BTreeMap<String, u32>, GrowthMonitor) {
    let (start, mut fault_counts) = (Instant::now(), BTreeMap::new());
    let mut growth = GrowthMonitor::start_sampling(deadline - start, cluster);
    let mut next_outage = start + OUTAGE_INTERVAL.min((deadline - start) / 4);
    while Instant::now() < deadline {
        sleep(rng.random_duration(1, 6));
        if (next_outage..deadline - OUTAGE.min(deadline - start)).contains(&Instant::now()) {
            let mode = rng.one_of(&[NetworkMode::Reset, NetworkMode::Silent, NetworkMode::Broken]);
            println!("{:>6.1} s: an outage, {mode:?}", start.elapsed().as_secs_f64());
            inject_outage(cluster, mode);
            *fault_counts.entry(format!("outage {mode:?}")).or_default() += 1;
            next_outage = Instant::now() + OUTAGE_INTERVAL;
        }
        let protected = protected_program(start.elapsed(), deadline - start);
        let fault = InjectedFault::random(&mut rng, protected);
        growth.take_samples(cluster);
        if let InjectedFault::Kill(which) = fault {
            growth.record_kill(cluster, which);
        }
        let duration = rng.random_duration(0, fault.max_seconds());
        println!(
            "{:>6.1} s: {fault:?} for {:.1} s",
            start.elapsed().as_secs_f64(),
            duration.as_secs_f64()
        );
        inject(cluster, fault);
        sleep(duration);
        recover(cluster, fault);
        *fault_counts.entry(fault.name()).or_default() += 1;
        assert_all_running(cluster, fault);
    }
    (fault_counts, growth)
}

/// Our programs end only when they are killed; they wait for an unreachable API server.
fn assert_all_running(cluster: &mut SoakCluster, fault: InjectedFault) {
    for which in PROGRAMS {
        let program = cluster.program(which);
        assert!(
            program.is_running(),
            "{which:?} ended at {fault:?}:\n{}",
            program.tail()
        );
    }
}

/// Maximum time until everything has recovered after the last fault.
pub const RECOVERY_TIMEOUT: Duration = Duration::from_secs(600);
