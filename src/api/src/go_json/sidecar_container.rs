//! The order in which OpenKruise declares the fields of a SidecarSet's container. Its hash is computed over this JSON.

use super::{CONTAINER, GoStruct, inlined, nested, scalar};

/// `v1beta1.SidecarContainer`; `v1alpha1.SidecarContainer` is the same.
pub const SIDECAR_CONTAINER: GoStruct = GoStruct(&[
    inlined(&CONTAINER),
    scalar("podInjectPolicy"),
    nested("upgradeStrategy", &UPGRADE_STRATEGY).or_default_json("{}"),
    nested("shareVolumePolicy", &SHARE_POLICY).or_default_json("{}"),
    nested("shareVolumeDevicePolicy", &SHARE_POLICY),
    nested("transferEnv", &TRANSFER_ENV),
    nested("resourcesPolicy", &RESOURCES_POLICY),
]);

const UPGRADE_STRATEGY: GoStruct = GoStruct(&[scalar("upgradeType"), scalar("hotUpgradeEmptyImage")]);
const SHARE_POLICY: GoStruct = GoStruct(&[scalar("type")]);
const TRANSFER_ENV: GoStruct = GoStruct(&[
    scalar("sourceContainerName"),
    nested("sourceContainerNameFrom", &NAME_SOURCE),
    scalar("envName"),
    scalar("envNames"),
]);
const NAME_SOURCE: GoStruct = GoStruct(&[nested("fieldRef", &super::container::FIELD_REF)]);
const RESOURCES_POLICY: GoStruct = GoStruct(&[
    scalar("targetContainersMode").or_default_json("\"\""),
    scalar("targetContainersNameRegex"),
    nested("resourcesExpr", &RESOURCES_EXPR).or_default_json("{}"),
]);
const RESOURCES_EXPR: GoStruct = GoStruct(&[nested("limits", &EXPRS), nested("requests", &EXPRS)]);
const EXPRS: GoStruct = GoStruct(&[scalar("cpu"), scalar("memory")]);
