//! The order in which Go declares the fields of a container, as of Kubernetes 1.34; each release before it
//! declares a part of them in the same order.

use crate::go_json::{Struct, nested, plain};

/// `v1.Container`.
pub(super) const CONTAINER: Struct = Struct(&[
    plain("name"),
    plain("image"),
    plain("command"),
    plain("args"),
    plain("workingDir"),
    nested("ports", &PORT),
    nested("envFrom", &ENV_FROM),
    nested("env", &ENV),
    nested("resources", &RESOURCES).or("{}"),
    nested("resizePolicy", &RESIZE_POLICY),
    plain("restartPolicy"),
    nested("restartPolicyRules", &RESTART_RULE),
    nested("volumeMounts", &VOLUME_MOUNT),
    nested("volumeDevices", &VOLUME_DEVICE),
    nested("livenessProbe", &PROBE),
    nested("readinessProbe", &PROBE),
    nested("startupProbe", &PROBE),
    nested("lifecycle", &LIFECYCLE),
    plain("terminationMessagePath"),
    plain("terminationMessagePolicy"),
    plain("imagePullPolicy"),
    nested("securityContext", &SECURITY_CONTEXT),
    plain("stdin"),
    plain("stdinOnce"),
    plain("tty"),
]);

const PORT: Struct = Struct(&[
    plain("name"),
    plain("hostPort"),
    plain("containerPort").or("0"),
    plain("protocol"),
    plain("hostIP"),
]);
const ENV_FROM: Struct = Struct(&[
    plain("prefix"),
    nested("configMapRef", &NAMED),
    nested("secretRef", &NAMED),
]);
const NAMED: Struct = Struct(&[plain("name"), plain("optional")]);
const ENV: Struct = Struct(&[
    plain("name").or("\"\""),
    plain("value"),
    nested("valueFrom", &VALUE_FROM),
]);
const VALUE_FROM: Struct = Struct(&[
    nested("fieldRef", &FIELD_REF),
    nested("resourceFieldRef", &RESOURCE_FIELD_REF),
    nested("configMapKeyRef", &KEY_REF),
    nested("secretKeyRef", &KEY_REF),
    nested("fileKeyRef", &FILE_KEY_REF),
]);
const FIELD_REF: Struct = Struct(&[plain("apiVersion"), plain("fieldPath").or("\"\"")]);
const RESOURCE_FIELD_REF: Struct = Struct(&[
    plain("containerName"),
    plain("resource").or("\"\""),
    plain("divisor").or("\"0\""),
]);
const KEY_REF: Struct = Struct(&[plain("name"), plain("key").or("\"\""), plain("optional")]);
const FILE_KEY_REF: Struct = Struct(&[
    plain("volumeName"),
    plain("path"),
    plain("key"),
    plain("optional"),
]);
const RESOURCES: Struct = Struct(&[plain("limits"), plain("requests"), nested("claims", &CLAIM)]);
const CLAIM: Struct = Struct(&[plain("name"), plain("request")]);
const RESIZE_POLICY: Struct = Struct(&[plain("resourceName"), plain("restartPolicy")]);
const RESTART_RULE: Struct = Struct(&[plain("action"), nested("exitCodes", &EXIT_CODES)]);
const EXIT_CODES: Struct = Struct(&[plain("operator"), plain("values")]);
const VOLUME_MOUNT: Struct = Struct(&[
    plain("name"),
    plain("readOnly"),
    plain("recursiveReadOnly"),
    plain("mountPath").or("\"\""),
    plain("subPath"),
    plain("mountPropagation"),
    plain("subPathExpr"),
]);
const VOLUME_DEVICE: Struct = Struct(&[plain("name"), plain("devicePath")]);
const PROBE: Struct = Struct(&[
    nested("exec", &EXEC),
    nested("httpGet", &HTTP_GET),
    nested("tcpSocket", &TCP_SOCKET),
    nested("grpc", &GRPC),
    plain("initialDelaySeconds"),
    plain("timeoutSeconds"),
    plain("periodSeconds"),
    plain("successThreshold"),
    plain("failureThreshold"),
    plain("terminationGracePeriodSeconds"),
]);
const LIFECYCLE: Struct = Struct(&[
    nested("postStart", &HANDLER),
    nested("preStop", &HANDLER),
    plain("stopSignal"),
]);
const HANDLER: Struct = Struct(&[
    nested("exec", &EXEC),
    nested("httpGet", &HTTP_GET),
    nested("tcpSocket", &TCP_SOCKET),
    nested("sleep", &SLEEP),
]);
const EXEC: Struct = Struct(&[plain("command")]);
const HTTP_GET: Struct = Struct(&[
    plain("path"),
    plain("port").or("0"),
    plain("host"),
    plain("scheme"),
    nested("httpHeaders", &HTTP_HEADER),
]);
const HTTP_HEADER: Struct = Struct(&[plain("name").or("\"\""), plain("value").or("\"\"")]);
const TCP_SOCKET: Struct = Struct(&[plain("port").or("0"), plain("host")]);
const GRPC: Struct = Struct(&[plain("port").or("0"), plain("service").or("null")]);
const SLEEP: Struct = Struct(&[plain("seconds").or("0")]);
const SECURITY_CONTEXT: Struct = Struct(&[
    nested("capabilities", &CAPABILITIES),
    plain("privileged"),
    nested("seLinuxOptions", &SE_LINUX),
    nested("windowsOptions", &WINDOWS),
    plain("runAsUser"),
    plain("runAsGroup"),
    plain("runAsNonRoot"),
    plain("readOnlyRootFilesystem"),
    plain("allowPrivilegeEscalation"),
    plain("procMount"),
    nested("seccompProfile", &PROFILE),
    nested("appArmorProfile", &PROFILE),
]);
const CAPABILITIES: Struct = Struct(&[plain("add"), plain("drop")]);
const SE_LINUX: Struct = Struct(&[plain("user"), plain("role"), plain("type"), plain("level")]);
const WINDOWS: Struct = Struct(&[
    plain("gmsaCredentialSpecName"),
    plain("gmsaCredentialSpec"),
    plain("runAsUserName"),
    plain("hostProcess"),
]);
const PROFILE: Struct = Struct(&[plain("type"), plain("localhostProfile")]);
